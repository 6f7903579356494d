"""Which stored rows count today, and as what."""
