"""The proof: does the artifact compute what PyTorch computes?"""
