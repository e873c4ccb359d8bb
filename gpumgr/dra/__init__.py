"""The node's side of a DRA driver (Dynamic Resource Allocation): GPUs as devices with consumable capacity."""
