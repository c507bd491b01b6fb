"""The commands of the console script, a package each; what several need lies beside them."""
