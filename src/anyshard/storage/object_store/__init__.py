"""Object stores: S3 and what speaks like it, Google Cloud Storage, Azure, all through obstore.

Only `opening` is for other rooms. obstore is imported nowhere else in the package.
"""
