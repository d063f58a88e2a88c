"""Emit: from an attention back to Dynamo's graph, as a kernel's call that is built, spliced in and checked."""
