"""retraind: watches a spool directory, retrains a telemetry autoencoder, publishes its weights atomically."""

__version__ = "0.1.0"
