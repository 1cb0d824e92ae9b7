"""Time and memory of one step: engines beside each other, how cost grows, and what each choice adds."""
