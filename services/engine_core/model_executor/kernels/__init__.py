"""The operations between a decoder's matrix products, once for each kind of device."""
