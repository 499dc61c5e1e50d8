"""Commit: decides that a checkpoint exists. File names, generations, publishing, resolving, the one deletion rule."""
