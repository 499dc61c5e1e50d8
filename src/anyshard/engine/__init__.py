"""Engine: moves bytes. Writes blobs from sources, reads and verifies them, fills destinations.

Knows tables, plans, handles and stores; knows nothing of tensors, app states, or what makes a checkpoint exist.
"""
