"""The certificate of a run: the convergence theorems against its measured gradients, from replayed rounds."""

from fedcover.certificate.certifying import certify as certify
