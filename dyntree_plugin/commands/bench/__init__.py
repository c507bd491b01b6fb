"""Speed in the engine: no speculation, vLLM's chains, static and dynamic trees, in one run.

`plan` says what is compared, `prompts` on what, `measure` in which order; `engine` is one engine in
a process of its own, `pool` holds several of them, `server` drives one that runs elsewhere;
`results` is what is written down, `summary` what follows from it, `table` and `plots` show it.
"""
