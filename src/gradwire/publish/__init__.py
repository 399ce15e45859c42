"""Publishing weights: bit-exact patches from a trainer to its readers, over folders, object stores and groups."""

from gradwire.publish.publisher import Publication, WeightPublisher
from gradwire.publish.subscriber import WeightSubscriber

__all__ = ["Publication", "WeightPublisher", "WeightSubscriber"]
