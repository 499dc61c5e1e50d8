"""Testing: the contracts that every implementation of a protocol must pass. Needs pytest, which the rest of anyshard does not."""
