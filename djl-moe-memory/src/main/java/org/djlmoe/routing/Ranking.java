package org.djlmoe.routing;

/** Top-n with the project's tie rule: of equal scores the lower index comes first. */
final class Ranking {

    private Ranking() {}

    /**
     * Returns the indices of the n highest scores, highest first.
     *
     * @param scores no NaN
     * @param n at most {@code scores.length}
     */
    static int[] top(double[] scores, int n) {
        int[] top = new int[n];
        int size = 0;
        for (int e = 0; e < scores.length; e++) {
            // Insertion from the back; '>' leaves the lower index ahead of an equal one. (-0.0
            // equals 0.0.)
            int at = size;
            while (at > 0 && scores[e] > scores[top[at - 1]]) {
                at--;
            }
            if (at == n) {
                continue;
            }
            int last = Math.min(size, n - 1);
            System.arraycopy(top, at, top, at + 1, last - at);
            top[at] = e;
            size = Math.min(size + 1, n);
        }
        return top;
    }
}
