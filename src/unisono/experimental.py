"""The names of `tf.distribute.experimental`."""

from unisono.options import CommunicationImplementation, CommunicationOptions

__all__ = ["CommunicationImplementation", "CommunicationOptions"]
