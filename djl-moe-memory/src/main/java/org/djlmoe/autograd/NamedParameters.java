package org.djlmoe.autograd;

import ai.djl.nn.Parameter;
import java.util.Map;

/**
 * A block that has its own names for its parameters, such as the tensor names of a checkpoint
 * format. DJL's names change with every block that is wrapped around another; these don't.
 */
public interface NamedParameters {

    /**
     * Returns all parameters of this block and of the blocks in it by name.
     *
     * @return the parameters by name
     */
    Map<String, Parameter> namedParameters();
}
