"""How ranks agree: over the job's key-value store only, without process groups and collectives, so that nothing can hang or tear.

A `Group` names the ranks that take part; each save or load is one `Agreement` of it. The room knows bytes and ranks, never a
plan, a manifest or a tensor. Only `torch_dist` knows torch.
"""
