"""What the system says of this machine: hardware and software, network, cores, cards, processes."""
