"""The parts of a transformer: pure functions of parameters and inputs."""
