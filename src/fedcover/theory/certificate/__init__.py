"""The certificate of a run: the convergence theorems against its measured gradients, from replayed rounds."""

from fedcover.theory.certificate.assemble import certify as certify
