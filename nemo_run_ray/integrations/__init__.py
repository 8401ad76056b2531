"""For one other project each: NeMo-Skills and Nemotron."""
