"""Compare the speed of no speculation, vLLM's chains, and trees in one run.

`chains` lists vLLM's chains, `plan` all engines, and `prompts` reads the prompts; `measure` orders
the runs, for engines in processes of their own (`commands.loads`). `results` defines the file, and
`summary` computes figures from it. `terminal`, `overview` and `table` show them.
"""
