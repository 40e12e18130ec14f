"""What a transformer is made of: pure functions of parameters and inputs."""
