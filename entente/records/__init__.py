"""Types that several rooms share: policy versions, generation requests and generations, and the rows of a run."""
