"""How the tuner builds, bounds and checks each operator: one adapter a file."""
