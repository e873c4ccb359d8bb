"""HAMi's configuration and metrics, and the take-over of nodes from HAMi."""
