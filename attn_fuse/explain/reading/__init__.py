"""Reading: what the text of a repository says of its models, without running any of it."""
