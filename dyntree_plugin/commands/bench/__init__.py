"""Compare the speed of no speculation, vLLM's chains, and trees in one run.

`chains` says which of vLLM's chains are measured, `plan` lists all engines, and `prompts` reads the
prompts; `measure` orders the runs. `server` drives a server that runs elsewhere; other engines run
in processes of their own (`commands.loads`). `results` defines the file, and `summary` computes
figures from it. `terminal` and `overview` show them, and `table` writes them in Markdown.
"""
