"""Products of activations and weights, in the forms and the formats that compilers do well."""
