"""A run's whole life: its steps, which of them are kept, resuming, preemption, roles. Knows the verbs, not how they are done."""
