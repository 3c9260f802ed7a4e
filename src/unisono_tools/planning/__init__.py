"""What the communication of a step takes on a cluster, predicted from the cost model."""
