package org.djlmoe.plan;

/** A run does not fit its memory budget, whatever the chunk sizes; the message says what would. */
public final class BudgetExceededException extends IllegalArgumentException {

    private static final long serialVersionUID = 1L;

    private final long neededBytes;
    private final long budgetBytes;

    BudgetExceededException(String message, long neededBytes, long budgetBytes) {
        super(message);
        this.neededBytes = neededBytes;
        this.budgetBytes = budgetBytes;
    }

    /**
     * Returns the peak with the smallest chunks.
     *
     * @return bytes
     */
    public long neededBytes() {
        return neededBytes;
    }

    /**
     * Returns the budget.
     *
     * @return bytes
     */
    public long budgetBytes() {
        return budgetBytes;
    }
}
