"""The settings of a job as a comparison of scales asks for them."""
