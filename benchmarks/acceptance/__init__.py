"""The acceptance laboratory: every growth and rule on the same prompts, without the engine.

`models` runs Hugging Face models over ragged rows, `drafting` grows trees with them, `texts` has
the target write, `simulate` replays speculative decoding, `methods` names what is compared,
`report` and `plots` show it.
"""
