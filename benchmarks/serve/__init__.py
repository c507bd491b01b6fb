"""`dyntree bench serve` with what only measurements for the pages need.

`shapes` enlarges the embedded target to the cost of a larger model, `slow_weights` simulates
offloaded weights, and `plots` draws a result.
"""
