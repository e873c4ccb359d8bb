"""The mechanisms that keep a container within its share of a GPU, behind one interface (`backend.Backend`)."""
