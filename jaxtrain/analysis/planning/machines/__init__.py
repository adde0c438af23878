"""The machines that plans are made for, and their compilers' devices."""
