"""`dyntree show`: the tree of every step of one completion."""
