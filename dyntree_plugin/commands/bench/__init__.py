"""Compare the speed of no speculation, vLLM's chains, and static and dynamic trees in one run.

`plan` lists the engines and `prompts` reads the prompts; `measure` orders the runs. `engine` runs
one engine in a process of its own, `pool` keeps several of them, and `server` drives a server that
runs elsewhere. `results` defines the file, `summary` computes figures from it, and `table` and
`plots` show them.
"""
