"""HAMi's metrics, and the takeover of nodes from HAMi."""
