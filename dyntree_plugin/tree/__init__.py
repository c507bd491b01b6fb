"""The algorithm: growing a token tree and verifying it. Imports torch, never vLLM.

`registry` lists the growths and the rules. Growth ``topk`` and rule ``match`` serve; `papers` holds
the others, and only the registry imports them.
"""
