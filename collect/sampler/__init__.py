"""The sampler records telemetry of the machine on which it runs. It uses little CPU, so it can run beside a measurement."""
