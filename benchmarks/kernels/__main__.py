from benchmarks.kernels.on_cpu import main

main()
