"""Records: what a checkpoint is. Regions, tables, plans, addresses, and the codecs of every file but the tensor bytes.

No torch, no I/O: bytes in, frozen records out, and back.
"""
