"""What the kubelet calls: the device plugins and the DRA driver."""
