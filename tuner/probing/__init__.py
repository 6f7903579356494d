"""What a machine or a fleet reaches, measured by its own ranks and made into a cluster."""
