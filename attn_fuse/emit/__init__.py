"""From an attention back to Dynamo's graph: the operations of a kernel's call, spliced in, and checked."""
