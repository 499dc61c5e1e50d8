"""Planning: pure functions on tables. What each rank writes where, and which bytes a load reads. Knows no tensors, no stores."""
