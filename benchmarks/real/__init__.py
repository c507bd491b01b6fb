"""Compare answers of published models with and without trees: python -m benchmarks.real"""
