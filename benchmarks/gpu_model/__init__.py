"""What trees should give on a GPU: a model from data sheets, launch counts and measured
acceptance. No figure of it was measured on a GPU."""
