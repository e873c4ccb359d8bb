/* dlsym: gm_dlsym_pick(handle, name, caller) returns the function that the caller gets. 1: there is none. NULL: the C library's dlsym is
 * entered by a jump, with the arguments and the return address of our caller, on which RTLD_NEXT and RTLD_DEFAULT depend. */
    .text
    .globl dlsym
    .type dlsym, %function
#if defined(__x86_64__)
dlsym:
    .cfi_startproc
    endbr64
    pushq %rdi
    .cfi_adjust_cfa_offset 8
    pushq %rsi
    .cfi_adjust_cfa_offset 8
    subq $8, %rsp
    .cfi_adjust_cfa_offset 8
    movq 24(%rsp), %rdx
    call gm_dlsym_pick
    addq $8, %rsp
    .cfi_adjust_cfa_offset -8
    popq %rsi
    .cfi_adjust_cfa_offset -8
    popq %rdi
    .cfi_adjust_cfa_offset -8
    testq %rax, %rax
    jz 1f
    cmpq $1, %rax
    jne 2f
    xorl %eax, %eax
2:  ret
1:  movq gm_real_dlsym(%rip), %rax
    jmp *%rax
    .cfi_endproc
#elif defined(__aarch64__)
dlsym:
    .cfi_startproc
    stp x29, x30, [sp, #-32]!
    .cfi_adjust_cfa_offset 32
    .cfi_offset 29, -32
    .cfi_offset 30, -24
    stp x0, x1, [sp, #16]
    mov x29, sp
    mov x2, x30
    bl gm_dlsym_pick
    mov x9, x0
    ldp x0, x1, [sp, #16]
    ldp x29, x30, [sp], #32
    .cfi_restore 29
    .cfi_restore 30
    .cfi_adjust_cfa_offset -32
    cbz x9, 1f
    cmp x9, #1
    csel x0, xzr, x9, eq
    ret
1:  adrp x9, gm_real_dlsym
    ldr x9, [x9, #:lo12:gm_real_dlsym]
    br x9
    .cfi_endproc
#else
#error "x86-64 and arm64 only"
#endif
    .size dlsym, . - dlsym
    .section .note.GNU-stack, "", %progbits
