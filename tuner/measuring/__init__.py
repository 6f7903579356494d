"""One configuration on its ranks: times, peaks, their modes, and what surrounded them."""
