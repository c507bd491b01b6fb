"""What proposes nodes: for each kind of draft, what vLLM loads, and how trees run it."""
