"""`dyntree doctor`: what works on this machine, and what dyntree would refuse."""
