"""`dyntree top`: figures of a running server."""
